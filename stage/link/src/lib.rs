//! The link between stages: frames, handshake, TLS, credits and the return path.
pub mod frame;
