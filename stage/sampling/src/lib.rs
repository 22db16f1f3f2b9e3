//! Sampling on the last stage: samplers, penalties, log-probabilities and grammars. No llama.cpp.
