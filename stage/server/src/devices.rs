//! The `devices` command: what layers can be put on, by the names that `engine.devices` takes.

use std::io::Write;

use splitmodel_engine::{Device, DeviceKind, EngineError};

/// Why devices cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum DevicesError {
    /// llama.cpp's backends.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Standard output.
    #[error("standard output: {0}")]
    Print(#[from] std::io::Error),
}

/// Prints the devices of this machine as a table.
///
/// # Errors
/// [`DevicesError`].
pub fn main() -> Result<(), DevicesError> {
    let table = table(&splitmodel_engine::devices()?);
    Ok(std::io::stdout().lock().write_all(table.as_bytes())?)
}

fn kind(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cpu => "CPU",
        DeviceKind::Gpu => "GPU",
        DeviceKind::IntegratedGpu => "integrated GPU",
        DeviceKind::Accelerator => "accelerator",
    }
}

/// Bytes in GiB with one decimal; a driver that does not know says 0.
fn memory(bytes: u64) -> String {
    if bytes == 0 {
        return "unknown".to_owned();
    }
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

fn table(devices: &[Device]) -> String {
    let heads = ["NAME", "KIND", "MEMORY", "FREE", "DESCRIPTION"].map(str::to_owned);
    let cells = devices.iter().map(|d| {
        let about = match &d.id {
            Some(id) => format!("{} ({id})", d.description),
            None => d.description.clone(),
        };
        [d.name.clone(), kind(d.kind).to_owned(), memory(d.memory_total), memory(d.memory_free), about]
    });
    let rows: Vec<[String; 5]> = std::iter::once(heads).chain(cells).collect();
    let widths: [usize; 5] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let mut out = String::new();
    for row in &rows {
        let line: String = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}  ")).collect();
        out.push_str(line.trim_end());
        out.push('\n');
    }
    if !devices.iter().any(|d| matches!(d.kind, DeviceKind::Gpu | DeviceKind::IntegratedGpu)) {
        out.push_str("\nNone of these takes layers: stages on this machine compute on the CPU.\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(name: &str, kind: DeviceKind, memory_total: u64) -> Device {
        let description = format!("a {name}");
        Device { name: name.to_owned(), description, kind, memory_free: memory_total / 2, memory_total, id: None }
    }

    #[test]
    fn columns_are_aligned() {
        let gpu = Device { id: Some("0000:01:00.0".into()), ..device("CUDA0", DeviceKind::Gpu, 80 << 30) };
        let text = table(&[gpu, device("CPU", DeviceKind::Cpu, 0)]);
        assert_eq!(
            text,
            "NAME   KIND  MEMORY    FREE      DESCRIPTION\n\
             CUDA0  GPU   80.0 GiB  40.0 GiB  a CUDA0 (0000:01:00.0)\n\
             CPU    CPU   unknown   unknown   a CPU\n"
        );
    }

    #[test]
    fn a_machine_without_devices_says_so() {
        let text = table(&[device("CPU", DeviceKind::Cpu, 1 << 30), device("BLAS", DeviceKind::Accelerator, 0)]);
        assert!(
            text.ends_with("\n\nNone of these takes layers: stages on this machine compute on the CPU.\n"),
            "{text}"
        );
    }
}
