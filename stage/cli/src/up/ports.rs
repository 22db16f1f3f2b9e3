//! Ports on loopback. Nothing can hand a bound port to another process without `unsafe`, so a port is bound to learn that
//! it is free, given up just before the stage binds it, and looked at again if the stage then fails.
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use crate::error::CliError;

/// Addresses of one stage's services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePorts {
    /// Where its upstream, or the last stage, dials it.
    pub link: SocketAddr,
    /// The control service.
    pub control: SocketAddr,
    /// The health service.
    pub health: SocketAddr,
    /// `/metrics`.
    pub metrics: SocketAddr,
}

/// Finds free ports for `stages` stages, all different, and none of them `api`.
///
/// # Errors
/// [`CliError::System`] when the machine has none left.
pub fn reserve(stages: u32, api: SocketAddr) -> Result<Vec<StagePorts>, CliError> {
    let wanted = stages as usize * 4;
    let mut held = Vec::with_capacity(wanted);
    let mut found = BTreeSet::new();
    while found.len() < wanted {
        // All are held until all are found: that alone makes them different.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(no_ports)?;
        let address = listener.local_addr().map_err(no_ports)?;
        held.push(listener);
        if address.port() != api.port() {
            found.insert(address);
        }
    }
    let found: Vec<SocketAddr> = found.into_iter().collect();
    Ok(found.chunks_exact(4).map(|c| StagePorts { link: c[0], control: c[1], health: c[2], metrics: c[3] }).collect())
}

const fn no_ports(source: std::io::Error) -> CliError {
    CliError::System { action: "find free ports on 127.0.0.1 for the stages", source }
}

/// Checks that the API can listen on `address`.
///
/// # Errors
/// [`CliError::PortInUse`] or [`CliError::Listen`], naming the flag.
pub fn check_api(address: SocketAddr) -> Result<(), CliError> {
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == ErrorKind::AddrInUse => Err(CliError::PortInUse { address }),
        Err(source) => Err(CliError::Listen { address, source }),
    }
}

/// Whether another program now has one of `ports`, which this stage was given.
#[must_use]
pub fn taken(ports: &StagePorts) -> bool {
    [ports.link, ports.control, ports.health, ports.metrics]
        .into_iter()
        .any(|address| matches!(TcpListener::bind(address), Err(e) if e.kind() == ErrorKind::AddrInUse))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_all_different_and_free() {
        let api = "127.0.0.1:8000".parse().unwrap();
        let ports = reserve(20, api).unwrap();
        let all: BTreeSet<u16> =
            ports.iter().flat_map(|p| [p.link.port(), p.control.port(), p.health.port(), p.metrics.port()]).collect();
        assert_eq!(all.len(), 80);
        assert!(!all.contains(&8000));
        assert!(!taken(&ports[0]));
        let _other = TcpListener::bind(ports[0].health).unwrap();
        assert!(taken(&ports[0]));
    }

    #[test]
    fn a_port_in_use_names_the_flag() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let error = check_api(address).unwrap_err();
        assert!(matches!(error, CliError::PortInUse { .. }));
        let text = error.to_string();
        assert!(text.contains("--port") && text.contains(&address.to_string()), "{text}");
        drop(other);
        check_api(address).unwrap();
        let text = check_api("203.0.113.1:1".parse().unwrap()).unwrap_err().to_string();
        assert!(text.contains("--host"), "{text}");
    }
}
