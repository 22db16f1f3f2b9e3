//! GGUF headers, family rules, range reads, and slices written as ordinary GGUF files.
