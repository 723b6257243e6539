"""The soak: real servers under all kinds of load at once, for as long as one likes, and every sample explained.

A trainer refreshes by every transport, strangers pause and abort, clients come, go and come again.  Each answer is
compared with the tensors that were sent: by content, in float64.  `make soak MINUTES=60`.
"""
