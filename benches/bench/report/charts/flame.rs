//! A flame graph: each function above the one that called it, as wide as the samples it was in.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{BACKGROUND, GREY, INK, OTHERS, TEAL};
use crate::profile::Frame;
use crate::report::numbers::whole;

pub(super) struct Flame<'a> {
    pub(super) title: String,
    pub(super) process: &'a Frame,
}

const WIDTH: u32 = 1_600;
const HEADER: i32 = 56;
const MARGIN: i32 = 12;
/// Pixels from one frame to the next above it.
const ROW: i32 = 19;
/// Pixels of a letter, about: no font is loaded to measure with.
const LETTER: usize = 7;

impl Flame<'_> {
    pub(super) fn draw(&self, path: &Path) {
        let rows = i32::try_from(self.process.depth()).unwrap();
        let height = HEADER + rows * ROW + MARGIN;
        let size = (WIDTH, u32::try_from(height).unwrap());
        let root = SVGBackend::new(path, size).into_drawing_area();
        root.fill(&BACKGROUND).unwrap();
        super::title(&root, &self.title);
        let width = f64::from(WIDTH) - 2.0 * f64::from(MARGIN);
        let scale = width / self.process.samples as f64;
        let bottom = height - MARGIN;
        draw(&root, self.process, f64::from(MARGIN), bottom, scale, GREY);
        // Threads are told apart by colour.
        let mut left = f64::from(MARGIN);
        let colours = [TEAL].into_iter().chain(OTHERS).cycle();
        for (thread, colour) in self.process.callees.iter().zip(colours) {
            above(&root, thread, left, bottom - ROW, scale, colour);
            left += thread.samples as f64 * scale;
        }
        root.present().unwrap();
    }
}

/// A frame and all that it called.
fn above<DB: DrawingBackend>(
    root: &DrawingArea<DB, Shift>,
    frame: &Frame,
    left: f64,
    bottom: i32,
    scale: f64,
    colour: RGBColor,
) {
    draw(root, frame, left, bottom, scale, colour);
    let mut left = left;
    for callee in &frame.callees {
        above(root, callee, left, bottom - ROW, scale, colour);
        left += callee.samples as f64 * scale;
    }
}

fn draw<DB: DrawingBackend>(
    root: &DrawingArea<DB, Shift>,
    frame: &Frame,
    left: f64,
    bottom: i32,
    scale: f64,
    colour: RGBColor,
) {
    #[expect(clippy::cast_possible_truncation, reason = "pixels of the chart")]
    let [from, to] = [left, left + frame.samples as f64 * scale].map(|x| x.round() as i32);
    let top = bottom - ROW;
    let shape = Rectangle::new(
        [(from, top + 1), (to - 1, bottom)],
        colour.mix(0.35).filled(),
    );
    root.draw(&shape).unwrap();
    let room = usize::try_from(to - from).unwrap_or(0) / LETTER;
    if room < 4 {
        return;
    }
    let share = 100.0 * frame.samples as f64 * scale / (f64::from(WIDTH) - 2.0 * f64::from(MARGIN));
    let mut text = format!("{} {} %", frame.name, whole(share));
    if text.chars().count() > room {
        text = frame.name.chars().take(room - 1).chain(['…']).collect();
    }
    let font = ("sans-serif", 12).into_font().color(&INK);
    let font = font.pos(Pos::new(HPos::Left, VPos::Center));
    root.draw_text(&text, &font, (from + 3, top + ROW / 2 + 1))
        .unwrap();
}
