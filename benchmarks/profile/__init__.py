"""`lockstep bench`: where the time of a step goes, and how far each operator is from what the machine allows."""
