"""On-policy distillation: a student with fewer layers learns from a served teacher, on its own samples."""
