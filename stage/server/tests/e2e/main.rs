//! Chains of real stage processes on loopback: what a user of the product gets. Every process is the product's own binary,
//! started from a configuration file; nothing in it is told that it is tested.
#![cfg(test)]
#![allow(clippy::print_stdout, reason = "figures for whoever reads the tests' output")]

mod harness;
mod replay;
