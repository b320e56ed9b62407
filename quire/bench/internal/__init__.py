"""What this project measures itself by: the card of reference numbers, soak and chaos, host time. Not for users."""
