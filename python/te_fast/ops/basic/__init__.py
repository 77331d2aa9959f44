"""The basic operations, by kind."""
