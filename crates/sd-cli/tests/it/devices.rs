//! `sd devices`.

use crate::run::{assert_refused, sd};

#[test]
fn the_processor_is_listed_with_its_memory() {
    let folder = tempfile::tempdir().unwrap();
    let ended = sd(folder.path(), &["devices"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for part in ["CPU ", "processor", "free of", "uses host memory in place"] {
        assert!(ended.out.contains(part), "`{part}` in {}", ended.out);
    }
    let ended = sd(folder.path(), &["devices", "--json"]);
    let devices: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    let devices = devices.as_array().unwrap();
    let processor = devices
        .iter()
        .find(|device| device["name"] == "CPU")
        .unwrap();
    assert_eq!(processor["kind"], "processor");
    assert!(processor["free"].as_u64().unwrap() <= processor["total"].as_u64().unwrap());
    assert_eq!(processor["host_memory_in_place"], "yes");
    assert_refused(
        folder.path(),
        &["devices", "--server", "nowhere"],
        &["nowhere"],
    );
}
