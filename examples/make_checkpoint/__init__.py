"""`lockstep make-checkpoint`: write a small random checkpoint of any model family in Hugging Face format."""
