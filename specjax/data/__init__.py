"""Prompts, chat rendering with loss masks, training batches, draft vocabularies."""
