"""Drafts: tokens that a request may get next, proposed for one verifying forward.

`base` has the interface of a drafter and `ngram` the drafter that looks the end of the text up in the text before, in
compiled code or in `plain_texts`.  `costs` decides how many drafted tokens a step verifies, and `depth_choice` how many
a model drafts.

It imports `rollout.core`.
"""
