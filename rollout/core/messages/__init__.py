"""The messages between the HTTP process and the scheduler, and the records in them."""
