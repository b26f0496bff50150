"""Dynamic KV management: what leaves the KV pool when it is full, and what comes back."""
