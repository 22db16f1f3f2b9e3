//! Slices on a Vulkan device against the unsplit model on the same device, bit for bit. Needs a build with the feature
//! `vulkan`, a driver, and `GGML_VK_DISABLE_FUSION=1`: `scripts/vulkan-smoke.sh` brings all of it.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{Chain, argmax, assert_same, config, run};
use splitmodel_engine::{Device, DeviceKind, EngineConfig, EngineError, Slice, devices};
use splitmodel_gguf::Model;
use splitmodel_gguf::tiny::{Arch, Tiny};

fn device() -> Device {
    let devices = devices().unwrap();
    let vulkan = devices.iter().find(|d| d.name.starts_with("Vulkan"));
    assert!(vulkan.is_some(), "no Vulkan device among {devices:?}");
    vulkan.unwrap().clone()
}

fn logits(chain: &mut Chain) -> Vec<Vec<f32>> {
    let tokens: Vec<i32> = (0..24).map(|i| 20 + (i * 37) % 200).collect();
    let mut out = chain.decode(&run(0, 0, &tokens)).unwrap();
    for at in 24..27 {
        let next = argmax(out.last().unwrap());
        out.extend(chain.decode(&[(0, at, next, true), (1, at - 24, 40 + at, true)]).unwrap());
    }
    out
}

#[test]
#[ignore = "needs a Vulkan driver: scripts/vulkan-smoke.sh"]
fn slices_on_a_vulkan_device_give_the_bits_of_the_whole() {
    let device = device();
    assert!(matches!(device.kind, DeviceKind::Gpu | DeviceKind::IntegratedGpu), "{device:?}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    Tiny::new(Arch::Llama).write(&path).unwrap();
    let model = Model::open(&path).unwrap();
    let config = EngineConfig { n_ctx: 256, devices: vec![device.name.clone()], n_gpu_layers: Some(99), ..config() };
    let whole = Slice::load_whole(&path, &config, &mut |_| true).unwrap();
    let memory = whole.memory().clone();
    let there = memory.buffers.iter().filter(|b| b.place.starts_with("Vulkan"));
    assert_eq!(there.map(|b| b.kv).sum::<u64>(), memory.kv, "{memory:?}");
    let reference = logits(&mut Chain(vec![whole]));
    let got = logits(&mut Chain::of(&model, &[0, 3, 6, 8], &config));
    assert_same(&got, &reference, &device.description);

    // The CPU says nearly the same.
    let cpu = EngineConfig { devices: Vec::new(), n_gpu_layers: Some(0), ..config.clone() };
    let on_cpu = logits(&mut Chain::of(&model, &[0, 3, 8], &cpu));
    let pairs = on_cpu.iter().flatten().zip(reference.iter().flatten());
    let near = |a: f32, b: f32| (a - b).abs() <= 0.05 + 0.05 * b.abs();
    let far = pairs.filter(|&(&a, &b)| !near(a, b)).count();
    assert_eq!(far, 0, "logits far from the CPU's");

    let absent = EngineConfig { devices: vec!["Vulkan9".into()], ..config };
    let error = Slice::load_whole(&path, &absent, &mut |_| true).err().unwrap();
    assert!(matches!(&error, EngineError::NoDevice { available, .. } if available.contains(&device.name)), "{error}");
}
