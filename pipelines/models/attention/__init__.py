"""Attention of models that diffusers' dispatcher does not do for, with what is made once a job of it."""
