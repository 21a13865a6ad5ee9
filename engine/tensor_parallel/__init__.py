"""One model on several devices: each rank holds a shard of its weights and of the KV, and all run the same steps."""
