"""What each event does to the world: a module for each group of events, and those that they share."""
