"""What the examples share that train a real model against a live server: the server, the progress, the last layers."""
