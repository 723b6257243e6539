"""The mixed fuzz: random schedules of all that a scheduler can do; each request must get what it gets alone.

zoo            a small model of every family, its contents, and the answers to one request at a time
schedule       the actions, as plain data: drawn from a seed, printed compactly, played again
engine         a real scheduler turned step by step; a script controls its clock, weight I/O and KV events
watch          the weights that made each token and each KV of a request, seen from outside
checker        compares each finished request with the same request alone
listener       compares the prefix tree that KV events describe with the prefix tree
play           plays a schedule
shrink         a smaller schedule that fails all the same
wrong_engines  engines that break one rule each

    python -m tests.mixed run --seeds 5000
    python -m tests.mixed replay 123
"""
