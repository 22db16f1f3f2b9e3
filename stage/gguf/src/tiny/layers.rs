//! Tensors and metadata by architecture, as llama.cpp's loaders want them.

use super::{Arch, Builder, HEAD, N_EMBD, N_FF, N_HEAD, N_HEAD_KV};
use crate::value::OwnedValue;

const CONV: u64 = 4;
const D_STATE: u64 = 32;
const N_GROUP: u64 = 1;
const SSM_HEADS: u64 = 8;
const SHORT_CONV: u64 = 3;

/// Channels of the Mamba layers; llama.cpp wants twice the width from `granitehybrid`.
fn d_inner(arch: Arch) -> u64 {
    if arch == Arch::GraniteHybrid { 2 * N_EMBD } else { N_EMBD }
}

/// Metadata of one architecture; `set` puts its name before the key.
pub(super) fn metadata(arch: Arch, set: &mut dyn FnMut(&str, OwnedValue)) {
    let int = |n: u64| OwnedValue::u32(n as u32);
    match arch {
        Arch::Llama => set("rope.dimension_count", int(HEAD)),
        Arch::Qwen2 | Arch::Qwen3 => {}
        Arch::Gemma3 => {
            set("attention.sliding_window", int(32));
            set("rope.freq_base_swa", OwnedValue::f32(1000.0));
        }
        Arch::Lfm2 => set("shortconv.l_cache", int(SHORT_CONV)),
        Arch::FalconH1 | Arch::GraniteHybrid => {
            set("ssm.conv_kernel", int(CONV));
            set("ssm.inner_size", int(d_inner(arch)));
            set("ssm.state_size", int(D_STATE));
            set("ssm.time_step_rank", int(SSM_HEADS));
            set("ssm.group_count", int(N_GROUP));
        }
    }
    if arch == Arch::GraniteHybrid {
        set("embedding_scale", OwnedValue::f32(3.0));
        set("residual_scale", OwnedValue::f32(0.7));
        set("attention.scale", OwnedValue::f32(0.2));
        set("logit_scale", OwnedValue::f32(1.5));
    }
}

pub(super) fn layer(b: &mut Builder, arch: Arch, i: u32) {
    let name = |s: &str| format!("blk.{i}.{s}");
    b.norm(name("attn_norm.weight"), N_EMBD);
    match (arch, arch.is_recurrent(i)) {
        (Arch::Lfm2, true) => short_conv(b, i),
        (Arch::GraniteHybrid, true) => mamba2(b, arch, i),
        (Arch::FalconH1, _) => {
            attention(b, arch, i);
            mamba2(b, arch, i);
        }
        _ => attention(b, arch, i),
    }
    if arch == Arch::Gemma3 {
        b.norm(name("post_attention_norm.weight"), N_EMBD);
        b.norm(name("post_ffw_norm.weight"), N_EMBD);
    }
    b.norm(name(if arch == Arch::FalconH1 { "ffn_norm" } else { "ffn_norm.weight" }), N_EMBD);
    b.matrix(name("ffn_gate.weight"), N_EMBD, N_FF);
    b.matrix(name("ffn_up.weight"), N_EMBD, N_FF);
    b.matrix(name("ffn_down.weight"), N_FF, N_EMBD);
}

fn attention(b: &mut Builder, arch: Arch, i: u32) {
    let name = |s: &str| format!("blk.{i}.{s}");
    for (part, heads) in [("attn_q", N_HEAD), ("attn_k", N_HEAD_KV), ("attn_v", N_HEAD_KV)] {
        b.matrix(name(&format!("{part}.weight")), N_EMBD, heads * HEAD);
        if arch == Arch::Qwen2 {
            b.around(name(&format!("{part}.bias")), &[heads * HEAD], 0.0, 0.2);
        }
    }
    b.matrix(name("attn_output.weight"), N_HEAD * HEAD, N_EMBD);
    if matches!(arch, Arch::Qwen3 | Arch::Gemma3 | Arch::Lfm2) {
        // above 1, so that attention picks instead of averaging
        b.around(name("attn_q_norm.weight"), &[HEAD], 1.5, 0.1);
        b.around(name("attn_k_norm.weight"), &[HEAD], 1.5, 0.1);
    }
}

fn mamba2(b: &mut Builder, arch: Arch, i: u32) {
    let name = |s: &str| format!("blk.{i}.{s}");
    let inner = d_inner(arch);
    let conv = inner + 2 * N_GROUP * D_STATE;
    b.matrix(name("ssm_in.weight"), N_EMBD, inner + conv + SSM_HEADS);
    b.matrix(name("ssm_conv1d.weight"), CONV, conv);
    b.around(name("ssm_conv1d.bias"), &[conv], 0.0, 0.1);
    b.around(name("ssm_dt.bias"), &[SSM_HEADS], -1.0, 0.5);
    // negative: the state decays
    b.around(name("ssm_a"), &[1, SSM_HEADS], -1.0, 0.2);
    b.around(name("ssm_d"), &[1, SSM_HEADS], 1.0, 0.2);
    b.around(name("ssm_norm.weight"), &[inner / N_GROUP, N_GROUP], 1.0, 0.1);
    b.matrix(name("ssm_out.weight"), inner, N_EMBD);
}

fn short_conv(b: &mut Builder, i: u32) {
    let name = |s: &str| format!("blk.{i}.{s}");
    b.matrix(name("shortconv.conv.weight"), SHORT_CONV, N_EMBD);
    b.matrix(name("shortconv.in_proj.weight"), N_EMBD, 3 * N_EMBD);
    b.matrix(name("shortconv.out_proj.weight"), N_EMBD, N_EMBD);
}
