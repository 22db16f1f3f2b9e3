//! The API over a scripted backend, on a real loopback listener.

#[cfg(test)]
mod mutated;
#[cfg(test)]
mod requests;
#[cfg(test)]
mod serving;
#[cfg(test)]
mod stream;
#[cfg(test)]
mod support;
