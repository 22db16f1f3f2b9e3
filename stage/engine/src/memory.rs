//! Sizes of buffers, as llama.cpp reports them. Its C API gives none of them; its log lines do.

/// Bytes in one place (a device or the host).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BufferUse {
    /// ggml's name of the buffer type, such as `CPU_Mapped` or `CUDA0`.
    pub place: String,
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of the KV cache and of recurrent states.
    pub kv: u64,
    /// Bytes of buffers for intermediate results and outputs.
    pub compute: u64,
}

/// Bytes used by a loaded slice, accurate to about 10 kB a buffer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of the KV cache and of recurrent states.
    pub kv: u64,
    /// Bytes of buffers for intermediate results and outputs.
    pub compute: u64,
    /// The same by place.
    pub buffers: Vec<BufferUse>,
}

impl MemoryUse {
    /// Whether all caches are in host memory: then the processor computes the attention.
    pub(crate) fn is_on_host(&self) -> bool {
        self.buffers.iter().all(|b| b.kv == 0 || b.place.starts_with("CPU"))
    }

    /// Sums what llama.cpp wrote while loading.
    pub(crate) fn from_log<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let mut all = Self::default();
        for line in lines {
            if let Some((place, kind, bytes)) = parse(line) {
                all.add(place, kind, bytes);
            }
        }
        all
    }

    fn add(&mut self, place: &str, kind: Kind, bytes: u64) {
        let index = self.buffers.iter().position(|b| b.place == place).unwrap_or_else(|| {
            self.buffers.push(BufferUse { place: place.to_owned(), ..BufferUse::default() });
            self.buffers.len() - 1
        });
        let buffer = &mut self.buffers[index];
        let (sum, part) = match kind {
            Kind::Weights => (&mut self.weights, &mut buffer.weights),
            Kind::Kv => (&mut self.kv, &mut buffer.kv),
            Kind::Compute => (&mut self.compute, &mut buffer.compute),
        };
        *sum = sum.saturating_add(bytes);
        *part = part.saturating_add(bytes);
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Weights,
    Kv,
    Compute,
}

/// `load_tensors:   CPU_Mapped model buffer size =    92.48 MiB`
fn parse(line: &str) -> Option<(&str, Kind, u64)> {
    let (head, size) = line.split_once(" buffer size = ")?;
    let (head, kind) = [
        (" model", Kind::Weights),
        (" KV", Kind::Kv),
        (" RS", Kind::Kv),
        (" output", Kind::Compute),
        (" compute", Kind::Compute),
    ]
    .into_iter()
    .find_map(|(suffix, kind)| Some((head.strip_suffix(suffix)?, kind)))?;
    let place = head.split_whitespace().next_back()?;
    let mib: f64 = size.trim().strip_suffix("MiB")?.trim().parse().ok()?;
    Some((place, kind, (mib * 1024.0 * 1024.0) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_are_summed_by_place() {
        let lines = [
            "load_tensors:   CPU_Mapped model buffer size =    92.50 MiB",
            "load_tensors: RPC0[127.0.0.1:7501] model buffer size =    10.00 MiB",
            "llama_kv_cache:        CPU KV buffer size =    22.00 MiB",
            "llama_memory_recurrent:        CPU RS buffer size =     1.00 MiB",
            "sched_reserve:        CPU compute buffer size =    97.25 MiB",
            "llama_context:        CPU  output buffer size =     0.50 MiB",
            "llama_kv_cache: size =   22.00 MiB (  1024 cells,  30 layers,  4/1 seqs)",
            "garbage buffer size = many MiB",
        ];
        let use_ = MemoryUse::from_log(lines.into_iter());
        let mib = |x: f64| (x * 1024.0 * 1024.0) as u64;
        assert_eq!((use_.weights, use_.kv, use_.compute), (mib(102.5), mib(23.0), mib(97.75)));
        let places: Vec<_> = use_.buffers.iter().map(|b| (b.place.as_str(), b.weights, b.kv)).collect();
        assert_eq!(
            places,
            [("CPU_Mapped", mib(92.5), 0), ("RPC0[127.0.0.1:7501]", mib(10.0), 0), ("CPU", 0, mib(23.0)),]
        );
    }
}
