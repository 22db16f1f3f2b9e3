//! `splitmodel slice`: slices as GGUF files.
use std::path::{Path, PathBuf};

use splitmodel_gguf::{Model, Package, SlicePlan};

use crate::args::SliceArgs;
use crate::error::CliError;
use crate::{planning, ui};

/// Writes one slice, or one per stage.
///
/// # Errors
/// [`CliError`]: the flag, the file or the cut that is wrong.
pub fn run(args: &SliceArgs) -> Result<(), CliError> {
    let model = planning::open_model(&args.model, &args.model.display().to_string())?;
    match (&args.layers, &args.out, args.stages, &args.out_dir) {
        (Some(layers), Some(out), _, _) => {
            let (first, end) = parse_range(layers)?;
            keep_model(&model, out)?;
            write(&model, first, end, out)
        }
        (_, _, Some(stages), Some(dir)) => {
            std::fs::create_dir_all(dir).map_err(CliError::file("create", dir))?;
            for (stage, (first, end)) in planning::cut_evenly(&model, stages)?.into_iter().enumerate() {
                write(&model, first, end, &slice_path(dir, &args.model, stage, (first, end)))?;
            }
            Ok(())
        }
        _ => Err(CliError::Flag {
            flag: "layers",
            message: "give --layers a..b --out FILE, or --stages N --out-dir DIR".into(),
        }),
    }
}

/// Refuses to write a slice over a file of the model itself.
fn keep_model(model: &Model, out: &Path) -> Result<(), CliError> {
    let Ok(target) = out.canonicalize() else { return Ok(()) };
    let is_target = |file: &str| Path::new(file).canonicalize().is_ok_and(|file| file == target);
    if model.headers().any(|header| is_target(header.file())) {
        let message = format!("{} is the model itself; name another file", out.display());
        return Err(CliError::Flag { flag: "out", message });
    }
    Ok(())
}

/// `a..b` as numbers.
fn parse_range(text: &str) -> Result<(u32, u32), CliError> {
    let parsed = text.split_once("..").map(|(a, b)| (a.trim().parse::<u32>(), b.trim().parse::<u32>()));
    match parsed {
        Some((Ok(first), Ok(end))) if first < end => Ok((first, end)),
        _ => Err(CliError::Flag {
            flag: "layers",
            message: format!("`{text}` is no range; write a..b with a < b, such as 0..12 for the first twelve layers"),
        }),
    }
}

fn slice_path(dir: &Path, model: &Path, stage: usize, (first, end): (u32, u32)) -> PathBuf {
    let stem = model.file_stem().unwrap_or_default().to_string_lossy();
    dir.join(format!("{stem}-stage{stage}-layers{first}-{end}.gguf"))
}

fn write(model: &Model, first: u32, end: u32, out: &Path) -> Result<(), CliError> {
    let failed = |e: splitmodel_gguf::Error| CliError::Model { model: model.file().to_owned(), message: e.to_string() };
    let plan = SlicePlan::new(model, Package::Stage { first, end }).map_err(failed)?;
    let written = plan.write(out, &mut |_, _| {}).map_err(failed)?;
    ui::line(&format!("{}: layers [{first}, {end}), {}", out.display(), ui::bytes(written.bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_half_open() {
        assert_eq!(parse_range("0..12").unwrap(), (0, 12));
        for bad in ["", "3", "3..3", "4..3", "a..b", "-1..3", "0..4294967296", "1...3"] {
            let text = parse_range(bad).unwrap_err().to_string();
            assert!(text.starts_with("--layers: "), "{text}");
        }
    }

    #[test]
    fn file_names_say_what_is_inside() {
        let path = slice_path(Path::new("/out"), Path::new("/m/smol.gguf"), 1, (12, 20));
        assert_eq!(path, Path::new("/out/smol-stage1-layers12-20.gguf"));
    }
}
