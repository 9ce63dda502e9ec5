"""Looped transformers as programmable computers (Giannou et al., 2023): machines as weights, programs as prompts."""
