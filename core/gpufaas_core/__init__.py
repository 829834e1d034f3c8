"""Nouns, messages and errors that all services share. docs/glossary.md has the words."""
