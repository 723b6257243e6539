"""Hostile clients against a real server: `make abuse`, `python -m tests.abuse`.

registry    how servers are started, and the list of attacks
attacks     the attacks, one idea a file
server      the server under attack, under limits; it notes every answer
aftermath   what must hold after each attack
prober      asks /health twenty times a second, all the time
play        plays attacks, watched and judged
report      the table
schema      bodies at their extremes, from the server's own schemas
good        bodies that are right
wire        connections below HTTP clients
usage       memory and descriptors of processes
wrong_server  a server that is broken in a way that can be chosen, for the checks to catch
"""
