"""Speculative decoding: proposers guess a row's next tokens, which the model verifies in one step."""
