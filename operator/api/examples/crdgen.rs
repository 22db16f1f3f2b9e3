//! Prints the CustomResourceDefinition: `make crds`.

use std::io::Write as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    std::io::stdout().write_all(splitmodel_api::crd_yaml()?.as_bytes())?;
    Ok(())
}
