"""What the engine knows, as plain data with indexes. Nothing here decides."""
