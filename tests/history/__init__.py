"""The history checker: random histories of a real engine, every token of which must be explained by one version.

actions       what can happen, as plain data that prints compactly and can be played again
transports    the ways by which weights reach the engine, one entry each
driver        a real scheduler turned step by step, its weight I/O and its failures under script
expected      what each weight verb must answer, and which version is in force
reference     one sequence in float64, each token's keys and values under the version that wrote them
checker       every returned number against the reference
machine       plays a history
wrong_variants  engines that break one rule each, for the checker to catch
"""
