"""vllm.grpc.engine.VllmEngine, as the gateway SMG speaks it: a second front door, off unless it is asked for."""
