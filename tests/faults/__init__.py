"""The fault matrix: every fault of a weight refresh, wherever it can occur, and what the engine serves afterwards.

contents     versions of a small model, and what an engine that was started with each of them answers
engines      a real scheduler with a real model; what it serves, and which version that is
transports   the ways by which weights come, and what can happen to their bytes
pulls        versions that are published, and what can happen to them
injections   what goes wrong inside the engine
trainers     a refresh as a trainer does it, with a fault in it
cells        the faults, and where each can occur
matrix       runs cells
killed       trainers that are processes of their own, and are killed
ranks        engines of one and two ranks that are processes of their own, and are killed, or raise
stopped      ranks of a server that stop and go on, or die, at each point of each verb
report       the table
wrong_engines, wrong_ranks  engines and ranks that break one rule each, for the matrix to catch
"""
