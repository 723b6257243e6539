"""The fault engine of weight refresh: transports, faults and wrong engines, and the matrix of all faults.

Shared with the histories (`tests.history`):

contents     versions of small models, and the answers of engines that were started with them
harness      a real scheduler whose weight updates a test delivers
transports   the transports, and damage to the bytes on them
pulls        versions that are published, and damage to them
changes      faults in the tensors that are sent
injections   faults inside the engine
wrong_engines  engines and ranks that break one rule each, and which suite must notice each

The matrix plays every fault at every point of a refresh and judges what the engine serves afterwards:

engines      the engine under test, and the version that it serves
trainers     a refresh as a trainer does it, with a fault in it
cells        the faults, and where each can occur
matrix       runs cells
adapters     the same with an adapter as the target
killed       trainers that are processes of their own, and are killed
ranks        engines of one and two ranks that are processes of their own, and are killed, or raise
live_ranks   the ranks of a server as processes
stopped      ranks of a server that stop and go on, or die, at each point of each verb
report       the table
"""
