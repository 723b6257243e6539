"""The parts that training examples share: a server of their own, progress, the end by a signal, last layers."""
