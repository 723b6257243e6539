"""`GET /dashboard`: a page that shows the server live, and what it is fed from."""
