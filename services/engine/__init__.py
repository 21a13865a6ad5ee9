"""The engine service: the engine core behind one multiplexed gRPC stream."""
