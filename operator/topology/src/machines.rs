//! What a cluster says of its nodes and of the GPUs in them.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice, ResourceSliceSpec};
use splitmodel_api::Quantity;

/// Nodes, and what drivers of dynamic resource allocation publish of their devices; that is known also where GPUs are given out by
/// a device plugin, which says nothing of their memory.
#[derive(Clone, Debug, Default)]
pub struct Machines<'a> {
    /// The nodes.
    pub nodes: Vec<&'a Node>,
    /// The slices of all drivers.
    pub slices: Vec<&'a ResourceSlice>,
}

impl Machines<'_> {
    /// Bytes of the smallest device of `resource` on `node`, as the vendor's driver publishes it: the driver `gpu.example.com` for
    /// the resource `example.com/gpu`.
    #[must_use]
    pub fn published_memory(&self, node: &str, resource: &str) -> Option<u64> {
        let vendor = resource.split_once('/')?.0;
        let of_vendor =
            |driver: &str| driver == vendor || driver.strip_suffix(vendor).is_some_and(|d| d.ends_with('.'));
        let slices = self.slices.iter().map(|slice| &slice.spec).filter(|spec| of_vendor(&spec.driver));
        let slices = slices.filter(|spec| self.is_current(spec));
        let devices = slices.flat_map(|spec| {
            let here =
                |device: &&Device| device.node_name.as_ref().or(spec.node_name.as_ref()).is_some_and(|n| n == node);
            spec.devices.iter().flatten().filter(here)
        });
        devices.filter(|device| is_whole(device)).filter_map(memory).min()
    }

    /// Whether no slice of its pool is newer: a driver that changes its pool leaves the former slices for a while.
    fn is_current(&self, spec: &ResourceSliceSpec) -> bool {
        let same = |other: &&&ResourceSlice| other.spec.driver == spec.driver && other.spec.pool.name == spec.pool.name;
        let newest = self.slices.iter().filter(same).map(|other| other.spec.pool.generation).max();
        newest.is_none_or(|newest| spec.pool.generation >= newest)
    }
}

/// Whether a device is not a part of another one, as MIG devices are: drivers say so in the attribute `type`.
fn is_whole(device: &Device) -> bool {
    let attributes = device.attributes.iter().flatten();
    let mut types = attributes.filter(|(name, _)| name.rsplit('/').next() == Some("type"));
    types.all(|(_, value)| value.string.as_deref().is_none_or(|kind| kind == "gpu"))
}

/// Bytes of a device; the name of its capacity may carry the driver's domain.
fn memory(device: &Device) -> Option<u64> {
    let capacity = device.capacity.as_ref()?;
    let (_, memory) = capacity.iter().find(|(name, _)| name.rsplit('/').next() == Some("memory"))?;
    Quantity(memory.value.0.clone()).bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(text: &str) -> ResourceSlice {
        serde_saphyr::from_str(&format!(
            "metadata: {{name: s}}\nspec:\n  pool: {{name: p, generation: 1, resourceSliceCount: 1}}\n{text}"
        ))
        .unwrap()
    }

    #[test]
    fn the_smallest_device_of_the_vendor_on_the_node_counts() {
        let slices = [
            slice(
                "  driver: gpu.nvidia.com\n  nodeName: a\n  devices:\n  - {name: g0, capacity: {memory: {value: 80Gi}}}\n  - {name: g1, capacity: {memory: {value: 24Gi}}}\n  - {name: other}\n",
            ),
            slice(
                "  driver: gpu.nvidia.com\n  nodeName: b\n  devices: [{name: g0, capacity: {gpu.nvidia.com/memory: {value: 16Gi}}}]\n",
            ),
            slice(
                "  driver: nic.othernvidia.com\n  nodeName: a\n  devices: [{name: n0, capacity: {memory: {value: 1Gi}}}]\n",
            ),
            slice(
                "  driver: gpu.nvidia.com\n  perDeviceNodeSelection: true\n  devices: [{name: g0, nodeName: c, capacity: {memory: {value: 8Gi}}}]\n",
            ),
        ];
        let machines = Machines { slices: slices.iter().collect(), ..Machines::default() };
        let memory = |node, resource| machines.published_memory(node, resource);
        assert_eq!(memory("a", "nvidia.com/gpu"), Some(24 << 30));
        assert_eq!(memory("b", "nvidia.com/gpu"), Some(16 << 30));
        assert_eq!(memory("c", "nvidia.com/gpu"), Some(8 << 30));
        for (node, resource) in [("d", "nvidia.com/gpu"), ("a", "amd.com/gpu"), ("a", "gpu")] {
            assert_eq!(memory(node, resource), None, "{node} {resource}");
        }
    }

    #[test]
    fn former_slices_and_parts_of_devices_do_not_count() {
        let mut slices = [
            slice(
                "  driver: gpu.nvidia.com\n  nodeName: a\n  devices: [{name: g0, capacity: {memory: {value: 8Gi}}}]\n",
            ),
            slice(
                "  driver: gpu.nvidia.com\n  nodeName: a\n  devices:\n  - {name: g0, attributes: {type: {string: gpu}}, capacity: {memory: {value: 80Gi}}}\n  - {name: m0, attributes: {gpu.nvidia.com/type: {string: mig}}, capacity: {memory: {value: 10Gi}}}\n",
            ),
        ];
        slices[1].spec.pool.generation = 2;
        let machines = Machines { slices: slices.iter().collect(), ..Machines::default() };
        assert_eq!(machines.published_memory("a", "nvidia.com/gpu"), Some(80 << 30));
    }
}
