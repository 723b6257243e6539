"""The mixed fuzz: random schedules of everything that a scheduler can be asked, each request as if it were alone.

zoo            a small model of every family, its contents, and what an engine answers to one request at a time
schedule       what happens, as plain data: drawn from a seed, printed compactly, played again
engine         a real scheduler turned step by step, whose clock, weight I/O and KV events are the script's
watch          which weights made each token and each KV of a request, seen from outside
checker        each finished request against itself alone
listener       the prefix tree that KV events describe, against the prefix tree
play           plays a schedule
shrink         a smaller schedule that fails all the same
wrong_engines  engines that break one rule each

    python -m tests.mixed run --seeds 5000
    python -m tests.mixed replay 123
"""
