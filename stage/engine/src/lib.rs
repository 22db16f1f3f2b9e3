//! A slice of a model in llama.cpp: loading, batches, activations, the engine thread and schedule replay.
