//! Loading ggml's backends once, and the devices they bring.

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use llama_cpp_sys_2 as sys;

use super::{log, rpc};
use crate::{EngineConfig, EngineError};

/// Environment variable that names the folder of ggml's backend libraries.
const BACKENDS_ENV: &str = "SPLITMODEL_BACKENDS";

/// Kind of a compute device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// A GPU with its own memory, or a ggml-RPC server.
    Gpu,
    /// A GPU that shares the host's memory.
    IntegratedGpu,
    /// A helper of the CPU, such as BLAS; layers are not put on it.
    Accelerator,
}

/// A compute device of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name to use in `devices`, such as `CUDA0`.
    pub name: String,
    /// The driver's description.
    pub description: String,
    /// Kind.
    pub kind: DeviceKind,
    /// Bytes free when asked.
    pub memory_free: u64,
    /// Bytes in all; 0 when unknown.
    pub memory_total: u64,
    /// The bus address of a GPU, where known.
    pub id: Option<String>,
}

/// A ggml device. Devices are never freed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle(pub(super) sys::ggml_backend_dev_t);

/// Loads the backends unless that was done, and gives the folder they came from.
pub(super) fn init() -> Result<&'static Path, EngineError> {
    static INIT: OnceLock<Result<PathBuf, EngineError>> = OnceLock::new();
    INIT.get_or_init(load).as_deref().map_err(Clone::clone)
}

/// Folder that ggml's backends were loaded from. Loads them at the first call: from the folder that
/// `SPLITMODEL_BACKENDS` names, else `backends/` beside the executable, the executable's folder, or the build's.
///
/// # Errors
/// [`EngineError::Backends`] when no CPU backend is found.
pub fn backends_dir() -> Result<&'static Path, EngineError> {
    init()
}

/// Version of llama.cpp, as it reports it. All stages of a chain must have the same.
#[must_use]
pub fn llama_version() -> String {
    // SAFETY: returns a static string.
    unsafe { text(sys::llama_version()) }
}

fn load() -> Result<PathBuf, EngineError> {
    log::install();
    let candidates = candidates();
    for dir in candidates.iter().filter(|d| has_cpu_library(d)) {
        let Some(path) = dir.to_str().and_then(|d| CString::new(d).ok()) else { continue };
        // SAFETY: `path` is NUL-terminated and lives for the call; this runs once, before any other use of ggml.
        unsafe { sys::ggml_backend_load_all_from_path(path.as_ptr()) };
        // SAFETY: reads ggml's registry.
        if !unsafe { sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU) }.is_null() {
            // SAFETY: called once.
            unsafe { sys::llama_backend_init() };
            tracing::debug!(dir = %dir.display(), "llama.cpp backends loaded");
            return Ok(dir.clone());
        }
    }
    let searched: Vec<_> = candidates.iter().map(|d| d.display().to_string()).collect();
    Err(EngineError::Backends { searched: searched.join(", ") })
}

/// Folders to look into, best first. One that was named explicitly is the only one.
fn candidates() -> Vec<PathBuf> {
    if let Some(dir) = std::env::var_os(BACKENDS_ENV).filter(|d| !d.is_empty()) {
        return vec![dir.into()];
    }
    let mut dirs = Vec::new();
    if let Some(beside) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
        dirs.push(beside.join("backends"));
        dirs.push(beside.to_owned());
    }
    dirs.extend(option_env!("SPLITMODEL_LAID_BACKENDS").map(PathBuf::from));
    dirs
}

fn has_cpu_library(dir: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(dir) else { return false };
    entries.flatten().any(|e| e.file_name().to_str().is_some_and(|n| n.contains("ggml-cpu")))
}

/// The devices of this machine.
///
/// # Errors
/// When the backends cannot be loaded.
pub fn devices() -> Result<Vec<Device>, EngineError> {
    init()?;
    Ok(local().into_iter().map(describe).collect())
}

fn local() -> Vec<Handle> {
    // SAFETY: indices are below the count; devices are never removed.
    unsafe { (0..sys::ggml_backend_dev_count()).map(|i| Handle(sys::ggml_backend_dev_get(i))).collect() }
}

fn describe(device: Handle) -> Device {
    // SAFETY: the device is from ggml's registry, hence alive; `props` is plain data that the call fills in.
    let props = unsafe {
        let mut props: sys::ggml_backend_dev_props = std::mem::zeroed();
        sys::ggml_backend_dev_get_props(device.0, &mut props);
        props
    };
    // SAFETY: the strings belong to the device and are NUL-terminated or null.
    let (name, description, id) = unsafe { (text(props.name), text(props.description), text(props.device_id)) };
    Device {
        name,
        description,
        kind: kind(props.type_),
        memory_free: props.memory_free as u64,
        memory_total: props.memory_total as u64,
        id: Some(id).filter(|id| !id.is_empty()),
    }
}

fn kind(type_: sys::ggml_backend_dev_type) -> DeviceKind {
    match type_ {
        sys::GGML_BACKEND_DEVICE_TYPE_GPU => DeviceKind::Gpu,
        sys::GGML_BACKEND_DEVICE_TYPE_IGPU => DeviceKind::IntegratedGpu,
        sys::GGML_BACKEND_DEVICE_TYPE_CPU => DeviceKind::Cpu,
        _ => DeviceKind::Accelerator,
    }
}

/// A copy of a C string; empty for null.
///
/// # Safety
/// `s` is null or NUL-terminated and alive.
pub(super) unsafe fn text(s: *const c_char) -> String {
    if s.is_null() {
        return String::new();
    }
    // SAFETY: by the contract of this function.
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

/// Devices that layers go to, and how many layers. Without devices everything stays on the CPU.
pub(super) struct Placement {
    pub(super) devices: Vec<Handle>,
    pub(super) layers: i32,
}

/// Finds what `config` asks for; never less than it asks for.
pub(super) fn place(config: &EngineConfig) -> Result<Placement, EngineError> {
    init()?;
    if config.n_gpu_layers == Some(0) {
        return Ok(Placement { devices: Vec::new(), layers: 0 });
    }
    let mut pool: Vec<(Handle, Device)> = local().into_iter().map(|h| (h, describe(h))).collect();
    pool.retain(|(_, d)| matches!(d.kind, DeviceKind::Gpu | DeviceKind::IntegratedGpu));
    for endpoint in &config.rpc {
        pool.extend(rpc::connect(endpoint)?.into_iter().map(|h| (h, describe(h))));
    }
    let devices = if config.devices.is_empty() { all_gpus(&pool) } else { by_name(&pool, &config.devices)? };
    if devices.is_empty() {
        return match config.n_gpu_layers {
            Some(layers) => Err(EngineError::NoGpu { layers, available: list(local().into_iter().map(describe)) }),
            None => Ok(Placement { devices, layers: 0 }),
        };
    }
    if config.split_mode == crate::SplitMode::None && config.main_gpu as usize >= devices.len() {
        return Err(EngineError::config(
            "main_gpu",
            format!("is {}, but the devices used are {}", config.main_gpu, devices.len()),
        ));
    }
    // A negative number means all layers to llama.cpp.
    let layers = config.n_gpu_layers.map_or(-1, |n| i32::try_from(n).unwrap_or(i32::MAX));
    Ok(Placement { devices, layers })
}

/// Every discrete GPU, or the integrated ones where there is no other: as llama.cpp chooses.
fn all_gpus(pool: &[(Handle, Device)]) -> Vec<Handle> {
    let of = |kind| pool.iter().filter(move |(_, d)| d.kind == kind).map(|&(h, _)| h).collect::<Vec<_>>();
    let discrete = of(DeviceKind::Gpu);
    if discrete.is_empty() { of(DeviceKind::IntegratedGpu) } else { discrete }
}

fn by_name(pool: &[(Handle, Device)], names: &[String]) -> Result<Vec<Handle>, EngineError> {
    let mut out = Vec::with_capacity(names.len());
    for name in names {
        let Some(&(handle, _)) = pool.iter().find(|(_, d)| d.name == *name) else {
            let available = list(pool.iter().map(|(_, d)| d.clone()));
            return Err(EngineError::NoDevice { name: name.clone(), available });
        };
        if out.contains(&handle) {
            return Err(EngineError::config("devices", format!("names {name} twice")));
        }
        out.push(handle);
    }
    Ok(out)
}

fn list(devices: impl Iterator<Item = Device>) -> String {
    let names: Vec<_> = devices.map(|d| format!("{} ({})", d.name, d.description)).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// A function of a loaded backend library by its name.
pub(super) fn function(reg: sys::ggml_backend_reg_t, name: &CStr) -> Option<*mut c_void> {
    if reg.is_null() {
        return None;
    }
    // SAFETY: the registry entry is alive (never unloaded), the name NUL-terminated.
    let f = unsafe { sys::ggml_backend_reg_get_proc_address(reg, name.as_ptr()) };
    (!f.is_null()).then_some(f)
}

/// Registry entry of the backend of that name, null when it is not loaded.
pub(super) fn registry(name: &CStr) -> sys::ggml_backend_reg_t {
    // SAFETY: reads ggml's registry; the name is NUL-terminated.
    unsafe { sys::ggml_backend_reg_by_name(name.as_ptr()) }
}

/// Whether weights may be repacked into ggml's extra buffer types for the CPU. Not where one of them is AMX: GCC before
/// 12.4 and 13.3 drops stores of the tile configuration (PR target/114098), and the first batch ends in SIGILL. The
/// libraries that this build lays out have no AMX; those of another build may.
pub(super) fn may_repack() -> bool {
    type ExtraBuffers = unsafe extern "C" fn(sys::ggml_backend_dev_t) -> *const sys::ggml_backend_buffer_type_t;
    let Some(list) = function(registry(c"CPU"), c"ggml_backend_dev_get_extra_bufts") else { return true };
    // SAFETY: the address is that of this function (ggml-backend.h); it gives a list that ends with null, or null.
    unsafe {
        let list = std::mem::transmute::<*mut c_void, ExtraBuffers>(list);
        let mut at = list(cpu().0);
        while !at.is_null() && !(*at).is_null() {
            if text(sys::ggml_backend_buft_name(*at)) == "AMX" {
                return false;
            }
            at = at.add(1);
        }
    }
    true
}

/// The CPU.
pub(super) fn cpu() -> Handle {
    // SAFETY: reads ggml's registry; `init` made sure of the device.
    Handle(unsafe { sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU) })
}
