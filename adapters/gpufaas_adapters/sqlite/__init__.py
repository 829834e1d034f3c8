"""What an embedded platform keeps in SQLite files."""
