//! Chains of real stage processes on loopback: what a user of the product gets. Every process is the product's own binary,
//! started from a configuration file; nothing in it is told that it is tested.
#![cfg(test)]
#![allow(clippy::print_stdout, reason = "figures for whoever reads the tests' output")]

mod clients_leave;
mod control;
mod disk;
mod errors;
mod fairness;
mod garbage;
mod harness;
mod hung;
mod idle;
mod peers;
mod pod;
mod precise;
mod pressure;
mod recovery;
mod refill;
mod remote;
mod replay;
mod rotation;
mod security;
mod shutdown;
mod states;
mod telemetry;
