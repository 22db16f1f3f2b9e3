//! Reading a manifest for this machine.
use std::io::Read as _;
use std::path::{Path, PathBuf};

use splitmodel_api::SplitModel;
use splitmodel_planner::Layout;
use splitmodel_topology::Wanted;

use crate::error::CliError;

/// Largest manifest worth reading, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Reads and checks the manifest `file`.
///
/// # Errors
/// [`CliError::File`], or [`CliError::Manifest`] with every problem.
pub fn read(file: &Path) -> Result<SplitModel, CliError> {
    let length = std::fs::metadata(file).map_err(CliError::file("read", file))?.len();
    if length > MAX_BYTES {
        return Err(wrong(file, format!("has {length} bytes, too many for a manifest; is this the right file?")));
    }
    // Devices and pipes have no length of their own.
    let mut text = String::new();
    let opened = std::fs::File::open(file).map_err(CliError::file("read", file))?;
    opened.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(CliError::file("read", file))?;
    if text.len() as u64 > MAX_BYTES {
        let message = format!("has more than {MAX_BYTES} bytes, too many for a manifest; is this the right file?");
        return Err(wrong(file, message));
    }
    SplitModel::from_yaml(&text).map_err(|e| wrong(file, e.to_string()))
}

fn wrong(file: &Path, message: String) -> CliError {
    CliError::Manifest { path: file.to_owned(), message }
}

/// What `model` of the manifest `file` asks for.
///
/// # Errors
/// [`CliError::Manifest`].
pub fn wanted(model: &SplitModel, file: &Path) -> Result<Wanted, CliError> {
    Wanted::new(model).map_err(|e| wrong(file, e.to_string()))
}

/// The file that the source of `model` means on this machine, absolute, if it means one; relative to the manifest `file`.
///
/// # Errors
/// [`CliError::Manifest`] or [`CliError::File`].
pub fn local_source(model: &SplitModel, file: &Path) -> Result<Option<PathBuf>, CliError> {
    let source = model.source().map_err(|e| wrong(file, format!("spec.model.source {e}")))?;
    let absolute = std::path::absolute(file).map_err(CliError::file("find", file))?;
    Ok(source.local_path(absolute.parent().unwrap_or(Path::new("/"))))
}

/// Reads and checks the manifest `file`; also the file that its source means on this machine, absolute.
///
/// # Errors
/// [`CliError::File`], [`CliError::Manifest`] with every problem, or [`CliError::Model`] for a source that is not on this
/// machine.
pub fn load(file: &Path) -> Result<(Wanted, PathBuf), CliError> {
    let model = read(file)?;
    let Some(path) = local_source(&model, file)? else {
        let source = &model.spec.model.source;
        let scheme = source.split("://").next().unwrap_or_default();
        return Err(CliError::Model {
            model: source.clone(),
            message: format!("{scheme}:// works in a cluster; here, bring the file and write its path as file://path"),
        });
    };
    Ok((wanted(&model, file)?, path))
}

/// Makes it `stages` stages.
///
/// # Errors
/// [`CliError::Flag`] when the manifest lists another number of them.
pub fn override_stages(wanted: &mut Wanted, stages: u32) -> Result<(), CliError> {
    if let Some(list) = &wanted.spec.stage_list
        && list.len() != stages as usize
    {
        let message =
            format!("is {stages}, but spec.stageList has {} entries; leave the flag or the list out", list.len());
        return Err(CliError::Flag { flag: "stages", message });
    }
    if !matches!(wanted.layout, Layout::Layers(_)) {
        wanted.layout = Layout::Stages(stages);
        // Nodes offer places for as many.
        wanted.spec.stages = Some(stages);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(spec: &str) -> Result<(Wanted, PathBuf), CliError> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.yaml");
        let head = "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata: { name: smol }\nspec:\n";
        std::fs::write(&file, format!("{head}{spec}")).unwrap();
        load(&file)
    }

    #[test]
    fn the_source_is_a_file_of_this_machine() {
        let path = |source: &str| read(&format!("  model: {{ source: '{source}' }}\n")).unwrap().1;
        assert_eq!(path("file:///models/m.gguf"), Path::new("/models/m.gguf"));
        assert!(path("file://m.gguf").is_absolute() && path("file://m.gguf").ends_with("m.gguf"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let model = "  model: { source: 'file://m.gguf' }\n";
        let unequal = "  stageList: [{}, { engine: { nUbatch: 8 } }]\n";
        let cases = [
            (format!("{model}  paralel: 2\n"), "spec.paralel"),
            (format!("{model}  parallel: 0\n"), "spec.parallel"),
            (format!("{model}{unequal}"), "spec.stageList[1].engine.nUbatch"),
            ("  model: { source: 'hf://a/b/c.gguf' }\n".into(), "hf:// works in a cluster"),
            ("  model: { source: 'm.gguf' }\n".into(), "spec.model.source"),
        ];
        for (spec, words) in cases {
            let text = read(&spec).unwrap_err().to_string();
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn the_flag_does_not_contradict_a_list() {
        let model = "  model: { source: 'file://m.gguf' }\n";
        let mut wanted = read(&format!("{model}  stages: 2\n")).unwrap().0;
        override_stages(&mut wanted, 5).unwrap();
        assert_eq!(wanted.spec.stages, Some(5), "nodes offer places for them");
        assert_eq!(wanted.layout, Layout::Stages(5));
        let mut wanted = read(&format!("{model}  stageList: [{{}}, {{}}]\n")).unwrap().0;
        assert!(override_stages(&mut wanted, 5).unwrap_err().to_string().starts_with("--stages: is 5"));
        override_stages(&mut wanted, 2).unwrap();
    }
}
