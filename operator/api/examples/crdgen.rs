//! Writes what is generated from the types into the repository at the given folder: `make crds`.

use std::fs;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from(std::env::args_os().nth(1).ok_or("usage: crdgen REPOSITORY")?);
    fs::write(root.join("crds/splitmodel.yaml"), splitmodel_api::crd_yaml()?)?;
    fs::write(root.join("charts/splitmodel-crds/templates/splitmodel.yaml"), splitmodel_api::crd_template()?)?;
    fs::write(root.join("docs/crd.md"), splitmodel_api::crd_reference())?;
    Ok(())
}
