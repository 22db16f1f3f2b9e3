//! The link between stages: frames, handshake, TLS, credits and the return path (docs/wire.md, version 1).
//!
//! - [`frame`]: rows, sections, frames, predictions. No I/O.
//! - [`codec`]: messages to bytes and back, over slices and over streams.
//! - [`setup`]: what two stages tell each other first, and what makes them refuse.
//! - [`connection`]: an established connection with credits, deadlines and a typed end.
//! - [`tls`], [`establish`] and [`handshakes`]: how a connection comes to be.

#[cfg(target_endian = "big")]
compile_error!("activations go over the wire as they lie in memory, which must be little-endian");

pub mod codec;
pub mod connection;
pub mod error;
pub mod establish;
pub mod frame;
pub mod handshakes;
pub mod setup;
pub mod tls;

pub use codec::{ActivationDtype, Limits, Message, read_message, write_message};
pub use connection::{ClosedReason, Connection, Event, Inbound, Options, Permit, Receiver, SendError, Sender};
pub use error::LinkError;
pub use establish::{Acceptor, Answer, Decide, Dialer, accept, accept_into, dial};
pub use handshakes::Handshakes;
pub use setup::{Agreed, Refusal, Setup};
pub use tls::{TlsConfig, TlsStore};
