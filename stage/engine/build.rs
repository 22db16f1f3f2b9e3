//! Lays llama.cpp's libraries beside the binaries, where they look for them (`$ORIGIN`), and its backends into `backends/`.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// The one CPU variant with AMX. While it is chosen no weight can be repacked: GCC before 12.4 and 13.3 breaks its AMX code
/// (PR target/114098). The next one, `zen4`, is the same without AMX, and repacks.
const LEFT_OUT: &str = "libggml-cpu-sapphirerapids.so";

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-env-changed=DEP_LLAMA_BACKENDS_DIR");
    let Some(backends) = env::var_os("DEP_LLAMA_BACKENDS_DIR").map(PathBuf::from) else { return Ok(()) };
    let (Some(built), Some(out)) = (backends.parent(), env::var_os("OUT_DIR").map(PathBuf::from)) else {
        return Ok(());
    };
    // OUT_DIR is <target>/<profile>/build/<package>/out.
    let Some(profile) = out.ancestors().nth(3) else { return Ok(()) };
    println!("cargo:rerun-if-changed={}", backends.display());
    for dir in [profile.to_owned(), profile.join("deps"), profile.join("examples")] {
        lay(&built.join("lib"), &dir, |name| name.contains(".so."))?;
    }
    let laid = profile.join("backends");
    lay(&backends, &laid, |name| name.contains(".so") && name != LEFT_OUT)?;
    match fs::remove_file(laid.join(LEFT_OUT)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // For programs that lie elsewhere, such as tests.
    println!("cargo:rustc-env=SPLITMODEL_LAID_BACKENDS={}", laid.display());
    Ok(())
}

/// Copies the wanted files of `from` that differ; each appears whole or not at all.
fn lay(from: &Path, to: &Path, wanted: impl Fn(&str) -> bool) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if !name.to_str().is_some_and(&wanted) {
            continue;
        }
        let (source, target) = (fs::read(entry.path())?, to.join(&name));
        if fs::read(&target).is_ok_and(|old| old == source) {
            continue;
        }
        let partial = to.join(format!("{}.{}", name.to_string_lossy(), std::process::id()));
        fs::write(&partial, source)?;
        fs::rename(&partial, &target)?;
    }
    Ok(())
}
