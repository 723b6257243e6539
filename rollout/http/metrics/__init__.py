"""The metrics of a server in Prometheus' text format."""
