"""The engine: scheduler, block pool and model runner. It knows token ids only, never text, gRPC or metrics."""
