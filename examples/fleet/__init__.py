"""A fleet: Ray starts and watches engines, a stock router spreads requests, one engine is killed and replaced.

sample      a sample and its way out of the wire
engine      an engine as a Ray actor
tether      a child that ends with its parent, however the parent ends
router      vllm-router as it is: workers come and go
trainer     the policy: learns, publishes each version, sends it to all engines
rollouts    the stream of prompts; a request that dies with its engine is sent again
fleet       starts engines, notices their end, replaces them
events      the events of a run and their times
check       checks of samples and events; pure functions
reference   an engine in this process that scores samples again under each version
display     the live view and the tables
run         `make example-fleet`: all of it, and the exit status
"""
