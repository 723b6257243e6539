"""The page that documents the routes."""
