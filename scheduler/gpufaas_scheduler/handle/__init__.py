"""The handlers of the events, a module for each group, and what they share."""
